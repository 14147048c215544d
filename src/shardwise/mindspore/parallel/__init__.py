"""What programs ask about their own parallelism."""
