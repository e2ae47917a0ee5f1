"""Negotiation: operations run in any order of submission, once every member has submitted them."""
