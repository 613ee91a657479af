"""Starting many ranks, or joining those that a launcher started, and ending all of them together."""
