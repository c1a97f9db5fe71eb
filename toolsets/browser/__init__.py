"""The browser tools and the Chromium behind them."""
