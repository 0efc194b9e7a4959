"""What a capture is: its wire, record, shard, layers and content hash. Importing it loads neither torch nor numpy."""
