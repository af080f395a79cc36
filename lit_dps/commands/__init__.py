"""The verbs of the command line; each module imports its own stack on use."""
