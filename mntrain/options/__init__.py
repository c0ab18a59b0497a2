"""Options: declared once, checked, and read from a command line, TOML files and mappings."""
