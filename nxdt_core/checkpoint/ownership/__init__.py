"""One run at a time saves to a store: file locks, leases and heartbeats."""
