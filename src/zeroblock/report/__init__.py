"""Reports: a run on the screen while it runs, and in files, figures and trackers afterwards."""
