"""The supervisor of a run, the connections of ranks to it, and what it concludes from their messages."""
