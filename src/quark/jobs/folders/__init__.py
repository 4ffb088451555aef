"""Of model folders: data, budgets, the flows and the writing, as a request says them."""
