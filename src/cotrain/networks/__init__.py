"""Networks: routing networks, and the shared bottom that is one of them."""
