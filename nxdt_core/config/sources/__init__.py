"""Where values come from: files, recipes, base files and the command line."""
