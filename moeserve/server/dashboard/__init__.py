"""The operator's page: what it shows, once a second, and the files it is made of."""
