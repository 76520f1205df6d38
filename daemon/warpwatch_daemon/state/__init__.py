"""The current state of the agent, in the hub."""
