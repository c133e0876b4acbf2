"""Writing a dump: each rank copies its shards to the host, and a thread writes them in parts."""
