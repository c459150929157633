"""What a run was and came to, in one file of HTML that needs nothing beside it."""
