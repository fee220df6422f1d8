"""Ray actors around the deciding code: workers, pools, the controller, and how they are started."""
