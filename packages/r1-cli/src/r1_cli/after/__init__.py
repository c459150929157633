"""What is made of runs when they are over: how two differ, and a page that tells of one."""
