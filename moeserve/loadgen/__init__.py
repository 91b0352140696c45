"""Loads for servers of the OpenAI API: what is sent when, what the clients see, and what a report says of it."""
