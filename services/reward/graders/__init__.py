"""The graders of the reward service, one per GraderKind; `registry` lists them."""
