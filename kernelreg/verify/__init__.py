"""Whether a backend keeps an operation's contract: calls drawn from it, judged against the float64 recurrence."""
