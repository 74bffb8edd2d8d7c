"""Long Range Arena (Tay et al. 2021, arXiv:2011.04006): six tasks, their data, and filling in their hidden inputs."""
