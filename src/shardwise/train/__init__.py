"""Training around the step: checkpoints for any plan, weight import and export, data in a global order, a Trainer."""
