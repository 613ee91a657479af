"""Files, locks, processes, HTTP and text: what the operating system offers, without torch and without plugins."""
