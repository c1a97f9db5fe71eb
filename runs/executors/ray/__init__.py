"""Workers as Ray actors on other machines."""
