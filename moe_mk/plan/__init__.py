"""Planning models: lower bounds on time and bytes of a layer, computed without building it."""
