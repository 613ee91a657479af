"""Pages of the documentation that are written from the code while the site is built."""
