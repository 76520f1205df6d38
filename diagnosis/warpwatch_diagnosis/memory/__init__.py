"""What of a process's memory grows: which type of object, which line, how much a step."""
