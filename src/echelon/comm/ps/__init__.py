"""The trainer's side of a parameter server: one conversation with every shard."""
