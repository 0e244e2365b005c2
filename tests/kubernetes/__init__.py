"""Tests of what runs on Kubernetes."""
