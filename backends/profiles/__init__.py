"""What was measured on real cards with ``kernelreg tune``: a file a card, which ranks on such cards."""
