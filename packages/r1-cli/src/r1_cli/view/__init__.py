"""What `r1 view` serves: curves and samples of run folders, as JSON to a page that is part of the package."""
