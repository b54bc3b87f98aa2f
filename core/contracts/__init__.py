"""What plugins implement and exchange; third parties read this folder and nothing else."""
