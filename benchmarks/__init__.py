"""The speed of cotrain beside what one would use instead, and beside the machine's limit."""
