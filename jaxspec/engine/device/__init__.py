"""What runs on the device: the plan of a dispatch, the step, and the state between them."""
