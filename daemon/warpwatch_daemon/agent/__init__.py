"""The composition: what runs in the agent's process, and in which order it starts and stops."""
