"""The trainer's side of a parameter server, and the messages, layout and state of both sides."""
