"""What the agent knows now: the hub that sources write to and everyone else reads from."""
