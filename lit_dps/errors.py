"""Errors that are the user's to mend. The commands print them as one line and exit with 2."""


class UserError(Exception):
    """Base of all errors that a change of input, files or storage mends."""


class ConfigError(UserError, ValueError):
    """A configuration value that is not allowed: names the key, the value and what is allowed."""

    def __init__(self, key: str, value: object, allowed: str):
        super().__init__(f"{key}: {value!r} is not allowed; {allowed}")
        self.key, self.value, self.allowed = key, value, allowed

    def __reduce__(self):  # it travels from workers to their parent
        return type(self), (self.key, self.value, self.allowed)


class DataError(UserError):
    """A data set that is missing, unreadable or truncated."""


class StorageError(UserError):
    """A study or tracking database, or a file of an analysis, that cannot be opened, read or written."""


class Unguarded(UserError):
    """A user's script calls a command without a guard, so that every process that the command starts runs it again."""

    EXIT_CODE = 64  # of those processes
    OURS = "lit-dps "  # what their names begin with

    def __init__(self):
        super().__init__(
            "a script that calls lit_dps.cli.main is run again by each process that this starts: "
            "call it below if __name__ == '__main__':"
        )


def user_error_in(error: BaseException | None) -> UserError | None:
    """The UserError that another error was raised from, if any: it says best what is wrong."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error
