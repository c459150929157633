"""A local server through which any agent samples from the policy; its tokens are recorded exactly."""
