"""The paper's protocol and claims, and the page that judges them."""
