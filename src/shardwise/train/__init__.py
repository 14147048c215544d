"""What surrounds a step: checkpoints for any plan, weights in and out, data in a global order, and a small loop."""
