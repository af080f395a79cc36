"""What a study says: tables, scaling laws, theory, figures. Needs neither torch nor a database."""
