"""The scheduler without a model: scenarios that a person can follow and a test can check."""
