"""The command line: one module per command of the core; app.py has the table of all."""
