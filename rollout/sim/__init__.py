"""The same controller, scheduler and cache under a virtual clock and a cost model of the machine."""
