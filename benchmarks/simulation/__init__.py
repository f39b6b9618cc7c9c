"""A fleet of model servers in virtual time, for comparing ways to share rollouts among them."""
