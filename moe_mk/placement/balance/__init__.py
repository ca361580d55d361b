"""How experts are copied and placed; the door is `moe_mk.placement.eplb`."""
