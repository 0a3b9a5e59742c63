"""Data sources: folders, tables, shards, the Hub, named data sets, rendered shapes."""
