"""What outlives a restart: anomalies with the minutes around them, in SQLite."""
