"""Fuzzing: any text gives a result or a KernelregError, within a second and in bounded memory."""
