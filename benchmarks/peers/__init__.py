"""The same methods in other libraries, for the speed benchmark."""
