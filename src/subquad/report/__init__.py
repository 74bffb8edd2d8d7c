"""From JSON and docstrings to pages: `report` shows runs in one HTML file, `atlas` is the site of all mechanisms."""
