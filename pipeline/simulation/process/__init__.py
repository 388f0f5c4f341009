"""What runs inside the processes of a command: the watch, and the replay of what it recorded."""
