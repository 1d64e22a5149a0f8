"""What changes the weights at the end of a step: the optimizer on the masters, the schedule and the loss scale."""
