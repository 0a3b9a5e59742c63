"""Report evaluations: scores of several encoders, their comparison, and the HTML page."""
